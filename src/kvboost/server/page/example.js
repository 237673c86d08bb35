// A document and two questions, for whoever wants to see the effect at once.

export const NAME = "About honey bees";

export const DOCUMENT = `About honey bees

The colony. Honey bees live in colonies. In summer a colony has about fifty thousand bees: one queen, some hundred drones, and workers. The queen is the mother of all of them. She lays up to two thousand eggs a day and may live for five years. Drones are the males. They have no sting, gather no food, and are driven out before winter. All workers are female. A worker that hatches in summer lives for about six weeks; one that hatches in autumn lives until spring.

The work. The age of a worker decides what she does. In the first days she cleans cells. Then she feeds the larvae, builds comb, takes nectar from others and packs pollen. At about eighteen days she guards the entrance. In her last weeks she flies out and gathers food. If too many foragers are lost, young bees start to fly early; if there are too few nurses, old bees go back to the nursery.

The comb. Bees build their comb from wax, which comes out of eight glands under the belly of young workers as thin flakes. They chew the flakes until they are soft and draw them out into walls of less than a tenth of a millimetre. The cells have six sides. No other form that fills a surface without gaps holds as much with so little wax. The cells slope upwards a little, so that nothing runs out of them.

Honey. Foragers suck nectar from flowers and carry it home in a special stomach. A full load weighs almost half as much as the bee. In the hive it goes from mouth to mouth, and each bee adds enzymes that split the sugar. Then it is spread out in the cells, and bees fan their wings until most of the water is gone. Nectar is up to eighty percent water, honey less than twenty. When the honey is ripe, the cell is closed with a lid of wax. For one jar of honey, bees visit about two million flowers and fly a distance of twice around the Earth.

Pollen. Honey gives energy, and pollen gives protein. Bees brush it from their hair and press it into little baskets on their hind legs. While they do so, some of it sticks to the next flower, and the plant can make seeds. About a third of what people eat depends on animals that carry pollen, and honey bees are the most important of them. Apples, cherries, almonds, pumpkins and cucumbers would give little fruit without them.

The dance. A forager that has found good flowers dances on the comb. If they are near, she runs in circles. If they are far away, she runs in the form of an eight and wags her body on the line in the middle. The angle between this line and the vertical is the angle between the flowers and the sun. The longer she wags, the farther the flowers: one second means about a kilometre. Others follow her in the dark, touch her with their antennae, and then fly there by themselves.

Winter. Bees do not sleep in winter. They form a ball around the queen and shiver with the muscles of their wings. In the middle it stays warm at about twenty-five degrees, even when it freezes outside. Those on the outside and those on the inside change places. For this they need food: a colony eats fifteen to twenty kilograms of honey until spring. A beekeeper who takes the honey in summer gives them sugar in its place.

Swarms. In May a strong colony may divide. The workers raise a new queen in a large cell and feed her with royal jelly only. Before she hatches, the old queen leaves with half of the bees. They hang in a tree like a bunch of grapes while some hundred scouts look for a hollow trunk. Each scout dances for the place that she has found, and when nearly all of them dance for the same one, the swarm flies off to it.

Dangers. A mite from Asia sucks on the larvae and brings viruses with it; without help most colonies would die of it within three years. Poisons in the fields, too few flowers after June, and long cold springs do the rest. Who wants to help lets a part of the garden grow wild, sows clover, and puts out a flat bowl of water with some stones to land on.`;

export const QUESTION = "What do bees do in winter?";

export const SECOND_QUESTION = "Why are bees important for people?";
