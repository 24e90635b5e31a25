"""`python -m benchmarks.choosing`: does the race of `camscope choose` recommend what all images recommend, and at what price?

Every candidate judges every image once; then races in other orders of the images are run on the values that are known, each
beside a run in the same order in which nobody drops out before the end.
--drawn                    candidates whose values are drawn: alike, and not
--photographs resnet18     photographs with boxes and a trained model, where a folder beside the project has them; else phantoms
--kept FILE.npz            the values stay there, block by block, and a second start goes on
"""

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.trained import BOXES, DATA, listed
from camscope import GradCAM, load_model
from camscope.batch import build_manifest
from camscope.evaluation.ground_truth import load_ground_truth
from camscope.evaluation.selection import method_selection as choosing
from camscope.evaluation.selection.candidate_explainers import build_candidates, evaluate_candidates
from camscope.evaluation.selection.load_samples import load_samples
from camscope.evaluation.selection.method_selection import MethodSelection, select_method
from camscope.evaluation.selection.rank_and_drop_candidates import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    ROBUSTNESS_METRIC,
    CandidateState,
    SelectionSample,
)
from camscope.explainers import Explainer
from camscope.phantom import CATEGORIES, draw_radiograph

CRITERIA = (FAITHFULNESS_METRIC, LOCALIZATION_METRIC, ROBUSTNESS_METRIC)
BLOCK = 8


class Remembering:
    """Evaluator with precomputed values: `objective` (candidates,criteria,images) and `patch_start` maps."""

    def __init__(self, tools: Sequence[Explainer], pool: Sequence[SelectionSample], known: Mapping[str, Any]) -> None:
        self.tools, self.pool, self.known = list(map(id, tools)), list(map(id, pool)), known

    def __call__(self, racing: Sequence[CandidateState], n_samples: Sequence[SelectionSample]) -> None:
        """A block of images."""
        places = [self.pool.index(id(one)) for one in n_samples]
        for one in racing:
            n = self.tools.index(id(one.explainer))
            for name, own in one.metric_values.items():
                own += self.known["values"][n, CRITERIA.index(name), places].tolist()
            one.n_images += len(n_samples)
            one.total_seconds += float(self.known["price"][n]) * len(n_samples)
            one.first_maps = one.first_maps or list(self.known["first"][n])


def asked(
    tools: Sequence[Explainer], pool: Sequence[SelectionSample], region: int, kept: Path | None
) -> dict[str, Any]:
    """What every candidate makes of every image; of those that are in `kept`, as it was found before."""
    standings = [CandidateState(tool, {name: [] for name in CRITERIA}) for tool in tools]
    found: dict[str, Any] = {"titles": np.array([one.title for one in standings])}
    if kept is not None and kept.exists():
        with np.load(kept) as stored:
            if stored["titles"].tolist() == found["titles"].tolist():
                found = dict(stored)
    there = found["values"].shape[2] if "values" in found else 0
    for start in range(there, len(pool), BLOCK):
        own = [CandidateState(tool, {name: [] for name in CRITERIA}) for tool in tools]
        evaluate_candidates(own, pool[start : start + BLOCK], 6, region, 0)
        values = np.array([[one.metric_values[name] for name in CRITERIA] for one in own])
        first, price = np.array([one.first_maps for one in own]), np.array([one.seconds_per_image for one in own])
        if start:
            values = np.concatenate([found["values"], values], 2)
            first, price = found["first"], (start * found["price"] + BLOCK * price) / (start + BLOCK)
        found |= {"values": values, "first": first, "price": price}
        if kept is not None:
            np.savez(kept, allow_pickle=False, **found)
        print(f"  {start + BLOCK} of {len(pool)} images", flush=True)
    return found | {"values": found["values"][:, :, : len(pool)]}


def phantoms(count: int) -> tuple[Any, list[SelectionSample], int]:
    """The bundled model, its images, and the side of a region."""
    model = load_model("phantom")
    scans = [draw_radiograph(3000 + n, CATEGORIES[1 + n % 3]) for n in range(count)]
    return model, [SelectionSample(GradCAM(model).prepare_input(one.image), one.name, one.mask) for one in scans], 8


def photographs(name: str, count: int) -> tuple[Any, list[SelectionSample], int]:
    """The same of a trained model and boxed photographs."""
    model = load_model(f"{DATA / 'models.py'}:{name}")
    with TemporaryDirectory() as folder:
        table = build_manifest(str(listed(Path(folder) / "list.csv")), "")
    boxes = load_ground_truth(str(BOXES / "annotations.json"), table.table.column_names, Path("/"), "all")
    pool, _ = load_samples(table, GradCAM(model), None, boxes, max_images=count)
    return model, pool, 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, race, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--photographs", metavar="MODEL")
    parser.add_argument("--kept", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.drawn:
        for candidates_of, spread in ((2, 0.0), (3, 0.0), (6, 0.0), (24, 0.0), (24, 0.7)):
            tell_drawn(candidates_of, spread, options.images, options.seeds)
        return
    name = options.photographs
    model, pool, region = photographs(name, options.images) if name else phantoms(options.images)
    tools = build_candidates(model, pool[0].item.x[None])
    judge = Remembering(tools, pool, asked(tools, pool, region, options.kept))
    with patch.object(choosing, "find_model_independence_reason", once(choosing.find_model_independence_reason)):
        for masked in (True, False):
            told(tools, pool if masked else blind(judge, pool), judge, options.seeds, "with" if masked else "without")


def once(
    asked: Callable[[Explainer, Sequence[SelectionSample], int], str],
) -> Callable[[Explainer, Sequence[SelectionSample], int], str]:
    """The same, asked once of each candidate and order: races of an order begin with the same images."""
    known: dict[tuple[int, int], str] = {}

    def answer(tool: Explainer, samples: Sequence[SelectionSample], seed: int) -> str:
        if (id(tool), seed) not in known:
            known[id(tool), seed] = asked(tool, samples, seed)
        return known[id(tool), seed]

    return answer


def blind(judge: Remembering, pool: Sequence[SelectionSample]) -> list[SelectionSample]:
    """The same samples without what is known of their evidence."""
    made = [SelectionSample(one.item, one.target) for one in pool]
    judge.pool = list(map(id, made))
    return made


def told(
    tools: Sequence[Explainer], pool: Sequence[SelectionSample], judge: Remembering, seeds: int, words: str
) -> None:
    """A line for each order of the images."""
    print(f"{words} masks, {len(tools)} candidates, {len(pool)} images", flush=True)
    found = []
    for seed in range(seeds):
        whole, race = (
            select_method(tools, pool, seed=seed, evaluate_block=judge, never_drop=kind) for kind in (True, False)
        )
        best, alike = (
            [{one.title for one in own} for own in each]
            for each in ((whole.best, race.best), (whole.survivors, race.survivors))
        )
        leader = whole.candidates[0].title == race.candidates[0].title
        found.append((share_of_maps(race, len(pool)), best[0] == best[1], leader, alike[0] == alike[1]))
        print(
            f"  seed {seed}: {found[-1][0]:.2f} of the maps, same recommendation {found[-1][1]}, same leader {leader}"
        )
        print(f"    all images: {said(whole)}\n    the race:   {said(race)}", flush=True)
    share, same, leader, alike = np.mean(found, 0)
    print(
        f"  {share:.2f} of the maps; in {seeds} orders the same recommendation in {same:.0%}, the same leader in {leader:.0%}, "
        f"the same who cannot be told apart in {alike:.0%}"
    )


def drawn(count: int, spread: float, images: int, seeds: int) -> Iterator[tuple[MethodSelection, MethodSelection]]:
    """Races of candidates whose values are normal, their means `spread` of an image's standard deviation apart.

    Each beside one in which nobody drops out before the end.
    """
    nothing: Any = None  # nobody looks at them
    pool = [SelectionSample(nothing) for _ in range(images)]
    tools: Any = [SimpleNamespace(composed_name=str(n), layer=None) for n in range(count)]
    places = {id(one): n for n, one in enumerate(pool)}
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        values = random.normal(random.normal(0, spread, (count, 1)), 1, (count, images))

        def judge(racing: Sequence[CandidateState], samples: Sequence[SelectionSample], values: Any = values) -> None:
            for one in racing:
                one.metric_values[FAITHFULNESS_METRIC] += [values[int(one.title), places[id(each)]] for each in samples]
                one.metric_values[ROBUSTNESS_METRIC] += [1.0] * len(samples)
                one.n_images += len(samples)

        with patch.object(choosing, "find_model_independence_reason", lambda *about: ""):
            whole, race = (
                select_method(tools, pool, region_size=1, seed=seed, evaluate_block=judge, never_drop=kind)
                for kind in (True, False)
            )
        yield whole, race


def tell_drawn(count: int, spread: float, images: int, seeds: int) -> None:
    """How often somebody is out, somebody wins, and both say the same."""
    found = []
    for whole, race in drawn(count, spread, images, seeds):
        best = [{one.title for one in each.best} for each in (whole, race)]
        out = [len(each.survivors) < count for each in (race, whole)]
        won = [bool(each.best) for each in (race, whole)]
        found.append((share_of_maps(race, images), *out, *won, best[0] == best[1]))
    share, *rest = np.mean(found, 0)
    out_, all_out, won_, all_won, same = (f"{one:.0%}" for one in rest)
    print(
        f"{count} candidates, spread {spread:g}: {share:.2f} of the maps; somebody is out in {out_} of the races (of all images "
        f"{all_out}), one or two win in {won_} ({all_won}); the same recommendation in {same}",
        flush=True,
    )


def share_of_maps(race: MethodSelection, images: int) -> float:
    """How many of the maps of all who started were computed."""
    counts = [one.n_images for one in race.candidates if one.n_images]
    return sum(counts) / (images * len(counts))


def said(choice: MethodSelection) -> str:
    """Who is recommended, or who cannot be told apart."""
    words = " or ".join(one.title for one in choice.best)
    return words or f"no clear winner among {', '.join(one.title for one in choice.survivors)}"


if __name__ == "__main__":
    main()
