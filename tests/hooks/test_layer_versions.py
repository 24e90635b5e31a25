"""One layer's output in many versions: rows by owner, one call, whatever structure, and nothing left behind."""

import threading

import pytest
import torch
from torch import nn

from camscope.hooks.cache_prefix_and_vary_output import replace_output_by_variants
from tests.nets import Plain, plain


def tripled(rows):
    return rows.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=rows.dtype).view(5, 1, 1, 1))


OWNERS = torch.tensor([1, 0, 0, 1, 1])


def test_row_i_is_a_version_of_the_row_of_its_owner():
    model, x = plain()
    y = model.before(x)
    expected = torch.stack([model.after(y[[owner]] * (i + 1))[0] for i, owner in enumerate(OWNERS.tolist())])
    with torch.no_grad(), replace_output_by_variants(model, "middle", OWNERS, tripled):
        found = model(x)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model(x), model.after(y), rtol=0, atol=0)


def test_what_the_layer_itself_keeps_is_not_written_over():
    class Keeping(nn.Conv2d):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    model = nn.Sequential(Keeping(3, 4, 1), nn.ReLU())
    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        right = model[0](x).clone()
        with replace_output_by_variants(model, "0", OWNERS, lambda rows: rows.zero_()):
            assert not model(x).any()
    assert torch.equal(model[0].kept, right)


def test_only_the_call_that_was_asked_for():
    class Twice(Plain):
        def forward(self, x):
            y = self.middle(torch.tanh(self.first(x)))
            return y, self.middle(torch.tanh(y[:, :4]))

    model, x = plain(Twice)
    with torch.no_grad():
        for call, rows in ((0, (5, 5)), (1, (2, 5)), (2, (2, 2))):
            with replace_output_by_variants(model, "middle", OWNERS, tripled, call_index=call):
                assert tuple(map(len, model(x))) == rows


def test_the_structure_around_the_map_is_handed_on():
    class Packing(nn.Module):
        def forward(self, x):
            return {"size": x.shape, "maps": [x, (2 * x).mean((2, 3))], "count": torch.tensor(3)}

    model, x = nn.Sequential(Packing()), torch.randn(2, 3, 4, 4)
    with replace_output_by_variants(model, "0", OWNERS, lambda rows: rows):
        found = model(x)
    assert found["size"] == x.shape
    assert torch.equal(found["maps"][0], x[OWNERS])
    assert torch.equal(found["maps"][1], (2 * x).mean((2, 3)))
    assert found["count"] == 3


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt("stop")])
def test_nothing_is_left_behind_whatever_is_raised(error):
    model, x = plain()

    def broken(rows):
        raise error

    with pytest.raises(type(error)) as caught, replace_output_by_variants(model, "middle", OWNERS, broken):
        model(x)
    assert caught.value is error
    assert not any(module._forward_hooks for module in model.modules())


def test_another_thread_sees_the_model_as_it_is():
    model, x = plain()
    expected, found = model(x).detach(), []
    with torch.no_grad(), replace_output_by_variants(model, "middle", OWNERS, tripled):
        thread = threading.Thread(target=lambda: found.append(model(x).detach()))
        thread.start()
        thread.join()
        assert len(model(x)) == 5
    assert torch.equal(found[0], expected)
