"""Targets of text: the tokens of a word and of an answer, and their scores."""

import math

import pytest
import torch

from camscope.errors import TargetError
from camscope.targets import Answer, Token
from camscope.targets.token_and_answer import group_tokens_by_word, sum_token_scores


class PieceTokenizer:
    """A tokenizer of pieces: "_" begins a word, as a space of the text."""

    unk_token_id = 0
    pieces = ("?", "_cat", "cat", "_ta", "maran", "_a", ".", "_")

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        text, ids = text.replace(" ", "_"), []
        while text:
            piece = max((piece for piece in self.pieces if text.startswith(piece)), key=len, default=text[0])
            ids.append(self.pieces.index(piece) if piece in self.pieces else 0)
            text = text[len(piece) :]
        return ids

    def decode(self, ids, **options):
        return "".join(self.pieces[i] for i in ids).replace("_", " ")

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]

    def __len__(self):
        return len(self.pieces)


def test_a_word_may_be_a_token_with_or_without_a_space():
    tokens = Token("cat", after=" a").encode(PieceTokenizer())
    assert tokens.ids == (5,)
    assert tokens.scored == (1,)
    assert set(tokens.candidates) == {1, 2}


def test_an_id_is_a_token():
    assert Token(5).encode(PieceTokenizer()).candidates == (5,)
    with pytest.raises(TargetError, match="token 8 is out of range: the tokenizer has 8 tokens"):
        Token(8).encode(PieceTokenizer())


@pytest.mark.parametrize(("word", "message"), [("catamaran", "no single token.*Answer"), ("zebra", "no single token")])
def test_a_word_of_several_tokens_is_an_error(word, message):
    with pytest.raises(TargetError, match=message):
        Token(word).encode(PieceTokenizer())


@pytest.mark.parametrize("word", ["", " ", None, True, -1, 1.5])
def test_a_token_is_a_word_or_an_id(word):
    with pytest.raises(TargetError, match="expected a word, or the id of a token"):
        Token(word)


@pytest.mark.parametrize("text", ["", "  ", None, 3])
def test_an_answer_is_text(text):
    with pytest.raises(TargetError, match="expected text"):
        Answer(text)


def test_the_kind_of_score_is_checked():
    with pytest.raises(TargetError, match="expected 'log_probability' or 'logit'"):
        Token("cat", score="probability")


def test_tokens_of_one_word_are_grouped():
    tokenizer = PieceTokenizer()
    ids = tokenizer.encode(" a tamaran.", add_special_tokens=False)
    words = group_tokens_by_word(tokenizer, ids)
    assert [word.text for word in words] == ["a", "tamaran."]
    assert [token for word in words for token in word.tokens] == list(range(len(ids)))
    assert Answer(" a tamaran.", word=1).encode(tokenizer).scored == words[1].tokens
    with pytest.raises(TargetError, match="word 2 is out of range: the answer has 2 words"):
        Answer(" a tamaran.", word=2).encode(tokenizer)


def test_scores_are_sums_of_log_probabilities_or_logits():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    assert float(sum_token_scores(logits, [0, 1], [1, 0])) == pytest.approx(math.log(0.75 * 0.8))
    assert float(sum_token_scores(logits, [1], [0], "logit")) == pytest.approx(math.log(4.0))


def test_a_text_target_alone_has_no_score():
    with pytest.raises(TargetError, match="call explain"):
        Token("cat")(torch.zeros(1, 3))
