"""Targets for vision-language models: a token that the model may write next, and an answer of several tokens."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from torch import Tensor

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, Target

TokenScore = Literal["log_probability", "logit"]


class ScoredTokens(NamedTuple):
    """Tokens that the model is made to write after the prompt, and those of them whose scores are summed.

    `candidates` are ids of which the likeliest one is scored as the last token. It is empty if `ids` hold all tokens.
    """

    ids: tuple[int, ...]
    scored: tuple[int, ...]
    candidates: tuple[int, ...] = ()


class BaseTextTarget(Target):
    """Base class of targets that are text written by a vision-language model. `explain` needs `prompt` and `processor`."""

    score: TokenScore

    def _check_score(self) -> None:
        if self.score not in ("log_probability", "logit"):
            raise TargetError(f"score={self.score!r}: expected 'log_probability' or 'logit'")

    @abstractmethod
    def encode(self, tokenizer: Any) -> ScoredTokens:
        """Convert the text to tokens.

        Args:
            tokenizer: The tokenizer of the model's processor.

        Returns:
            The tokens that the model is made to write, and those that are scored.

        Raises:
            TargetError: The text does not fit the tokenizer.

        """

    def __call__(self, output: Any) -> NoReturn:
        """Raise TargetError: the score needs the prompt and the processor, which only `explain` takes."""
        raise TargetError(
            f"{type(self).__name__} is a target for the text of a vision-language model",
            fix="call explain(image, target, prompt=..., processor=...)",
        )


@dataclass(frozen=True)
class Token(BaseTextTarget):
    """One token that a vision-language model may write next, given the image and the prompt.

    The score is the natural logarithm of the token's probability at the next position. Most tokenizers have two tokens
    for a word, with and without a space before it. The one with the higher probability there is explained.

    Args:
        word: A word that is a single token of the model, such as "cat", or the id of a token.
        after: The start of the answer, which the model has written already, such as "This is a". Its spaces count.
        score: "log_probability", or "logit" for the model's output before the softmax.

    Raises:
        TargetError: `word` is neither text nor an id, or `score` is unknown.

    >>> Token("cat", after="This is a").describe(0, str)
    'token "cat"'

    """

    word: str | int
    after: str = ""
    score: TokenScore = "log_probability"

    def __post_init__(self) -> None:
        is_id = isinstance(self.word, int) and not isinstance(self.word, bool) and self.word >= 0
        if not is_id and not (isinstance(self.word, str) and self.word.strip()):
            raise TargetError(f"Token({self.word!r}): expected a word, or the id of a token (0 or more)")
        if not isinstance(self.after, str):
            raise TargetError(f"after={self.after!r} of a Token: expected text")
        self._check_score()

    def encode(self, tokenizer: Any) -> ScoredTokens:
        """Return the tokens of the text `after`, and the ids that the word may have. A word of several tokens is an error."""
        before = tuple(encode_text(tokenizer, self.after))
        if isinstance(self.word, int):
            if self.word >= len(tokenizer):
                raise TargetError(
                    f"token {self.word} is out of range: the tokenizer has {plural(len(tokenizer), 'token')}"
                )
            return ScoredTokens(before, (len(before),), (self.word,))
        word, unknown = self.word.strip(), getattr(tokenizer, "unk_token_id", None)
        encoded = [encode_text(tokenizer, text) for text in dict.fromkeys((self.word, word, f" {word}"))]
        ids = tuple(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1 and ids[0] != unknown))
        if not ids:
            parts = [tokenizer.convert_ids_to_tokens(token) for token in encoded[0]]
            raise TargetError(
                f"{self.word!r} is no single token of this model, but {plural(len(parts), 'token')}: {parts}",
                fix=f"explain Answer({self.word!r})",
            )
        return ScoredTokens(before, (len(before),), ids)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `token "cat"`."""
        return f'token "{self.word}"' if isinstance(self.word, str) else f"token {self.word}"


@dataclass(frozen=True)
class Answer(BaseTextTarget):
    """An answer that a vision-language model may write, given the image and the prompt.

    The score is the natural logarithm of the answer's probability: the sum over its tokens, each after the tokens before
    it (teacher forcing). `explain_words` computes one map for each word.

    Args:
        text: The answer, such as "a cat on a mat". Its spaces count, also one at the start.
        score: "log_probability", or "logit" for the sum of the model's outputs before the softmax.
        word: Only this word of the answer, counted from 0: the sum over the tokens of the word. None: the whole answer.

    Raises:
        TargetError: `text` is empty or no text, or `score` is unknown.

    >>> Answer("a cat on a mat").describe(0, str)
    'answer "a cat on a mat"'

    """

    text: str
    score: TokenScore = "log_probability"
    word: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise TargetError(f"Answer({self.text!r}): expected text")
        self._check_score()

    def encode(self, tokenizer: Any) -> ScoredTokens:
        """Return the tokens of the answer, and those that are scored. A `word` out of range is an error."""
        ids = tuple(encode_text(tokenizer, self.text))
        if self.word is None:
            return ScoredTokens(ids, tuple(range(len(ids))))
        words = group_tokens_by_word(tokenizer, ids)
        if not 0 <= self.word < len(words):
            raise TargetError(f"word {self.word} is out of range: the answer has {plural(len(words), 'word')}")
        return ScoredTokens(ids, words[self.word].tokens)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `answer "a cat on a mat"`."""
        return f'answer "{self.text}"' if self.word is None else f'word {self.word} of "{self.text}"'


class Word(NamedTuple):
    """One word of an answer: its text, and the positions of its tokens in the answer."""

    text: str
    tokens: tuple[int, ...]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, without those that a tokenizer adds at the start or the end."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def group_tokens_by_word(tokenizer: Any, ids: Sequence[int]) -> list[Word]:
    """Group the tokens of an answer by words. A word begins at a token whose text begins with a space.

    The text of a token is what it adds to the decoded answer. Punctuation belongs to the word before it.
    """
    texts = [tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False) for count in range(len(ids) + 1)]
    words: list[Word] = []
    for position in range(len(ids)):
        before, after = texts[position], texts[position + 1]
        added = after[len(before) :] if after.startswith(before) else after
        begins = not words or added[:1].isspace() or before[-1:].isspace()
        if begins and (not words or words[-1].text.strip()):
            words.append(Word(added, (position,)))
        else:
            words[-1] = Word(words[-1].text + added, (*words[-1].tokens, position))
    return [Word(word.text.strip(), word.tokens) for word in words]


def sum_token_scores(
    logits: Tensor, positions: Sequence[int], tokens: Sequence[int], kind: TokenScore = "log_probability"
) -> Tensor:
    """Return the score of tokens of one sample: the sum of their log-probabilities or logits.

    Args:
        logits: (T,V) outputs of the model at each position.
        positions: The position before each token, whose output predicts it.
        tokens: The ids of the tokens.
        kind: "log_probability" or "logit".

    Returns:
        The sum, in at least float32.

    """
    rows = logits[list(positions)]
    rows = rows.double() if rows.dtype.itemsize == 8 else rows.float()
    values = rows.log_softmax(-1) if kind == "log_probability" else rows
    return values[range(len(tokens)), list(tokens)].sum()
