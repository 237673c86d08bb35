"""The loop: request, scheduler, engine, runner, sampler."""
