"""What is stored: slab layout, pool, blocks, prefix index."""
