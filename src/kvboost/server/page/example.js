// A document and two questions, for whoever wants to see the effect at once.

export const DOCUMENT = `Handbook of the harbour of Lindhavn, for crews and visitors

1. Arriving. Call the harbour office on channel 12 when you pass the red buoy off Skarv Point. Give the name of your boat, its length, its draught and how long you mean to stay. The office answers between six in the morning and ten at night. Outside these hours, tie up at the long wooden quay on the north side and report the next morning. The channel is dredged to four metres. On days of strong easterly wind the water can stand half a metre lower than the tables say, so boats that draw more than three metres should wait for the flood. The speed limit inside the moles is three knots, and wash that moves a moored boat counts as speeding whatever the log says.

2. Berths. Berths with green signs are free until the date written on them. Berths with red signs belong to members and must not be used, not even for an hour. Boats up to eight metres lie at pontoon A, up to twelve metres at pontoon B, and anything longer lies at the stone quay below the customs house. Use two lines ahead, two astern and at least one spring. The harbour master may move a boat whose owner cannot be found, and the owner pays for the work. Rafting up is allowed at the stone quay in July only, three boats deep at most.

3. Fees. A night costs twelve crowns for a boat of up to eight metres, eighteen up to twelve metres, and twenty-six beyond. The seventh night in a row is free. Pay at the machine beside the kiosk, which takes coins and cards, or at the office. The fee includes water, the showers and one bag of rubbish a day. Electricity is paid by the unit, two crowns for ten units, at the posts on the pontoons. Boats that leave before noon and come back the same evening pay once.

4. Water and fuel. Drinking water comes from the blue taps only; the grey taps carry water from the lake and are meant for washing decks. The fuel berth lies at the end of pontoon C and opens at eight. Turn off engines, stoves and electrical devices before the hose is handed over. Nobody may stay below deck while fuel is taken. Spilt fuel must be reported at once: the office keeps mats and booms ready, and nobody was ever fined for a spill that he reported himself.

5. Quiet and lights. Between eleven at night and six in the morning no engine runs in the harbour except to leave or to arrive. Halyards must be tied away from the mast. Deck lights that shine into other boats are switched off at eleven. The old lighthouse on the south mole shows a white flash every five seconds; it was lit with whale oil until 1861, with paraffin until 1923, and is electric today. It may be climbed on Sundays from two to five, twelve people at a time. Children must hold somebody's hand on the last thirty steps.

6. Weather. The mast beside the office carries one black ball for a forecast of wind above force six, and two for wind above force eight. With two balls up, no boat under ten metres may leave. Fog comes mostly in May and in September, rises from the fjord before dawn and is gone by ten. The horn on the north mole sounds twice a minute while the far shore cannot be seen.

7. Help. The doctor lives in the yellow house at the top of Smith's Lane and sees sailors at any time. The lifeboat is manned by volunteers and reaches any place in the fjord within twenty-five minutes. Call it on channel 16 and never on channel 12. The sailmaker, Mrs. Aune, mends sails overnight when they are brought before four in the afternoon. The smith does not work on Saturdays. Lost things are kept for a year in the cupboard under the stairs of the office, and are given to the school's fair afterwards.`;

export const QUESTION = "What does a night cost for a boat of ten metres?";

export const SECOND_QUESTION = "Where do I find drinking water?";
