"""Full-gradient methods, worked out by hand: the input is the only layer with cells, and the head's bias has no place."""

NUMBERS = {
    # |A1 g1| = [1, 2; 0, 0] and |A2 g2| = [4, 0; 1, 4], from 0..4 to 0..1 together, and added
    "fullgrad": [[5 / 4, 2 / 4], [1 / 4, 4 / 4]],
    "simplefullgrad": [[5 / 4, 2 / 4], [1 / 4, 4 / 4]],
}
