"""How far the parts of a map are from adding up to the number that they are parts of."""


def gap_in_words(parts: str, total: float, whole: str, expected: float) -> str:
    """`parts` add up to `total`; `whole`, which says what they should add up to, is the beginning of a sentence.

    >>> gap_in_words("the pixels' values", 0.8, "the score changes by", 1.0)
    "the pixels' values add up to 0.8, the score changes by 1: the gap is -0.2, 20.00% of it"
    """
    gap = total - expected
    share = f", {abs(gap / expected):.2%} of it" if expected else ""
    return f"{parts} add up to {total:.4g}, {whole} {expected:.4g}: the gap is {gap:+.2g}{share}"
