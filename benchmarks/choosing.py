"""`python -m benchmarks.choosing`: does the race of `camscope choose` recommend what all images recommend, and at what price?

Every candidate judges every phantom once; then races in other orders of the images are run on the values that are known.
"""

import argparse
import warnings
from collections.abc import Sequence

from camscope import GradCAM, load_model
from camscope.measure.candidates import candidates
from camscope.measure.choose import Choice, Sample, Standing, choose, judged
from camscope.phantom import CATEGORIES, draw


class Remembering:
    """A judge that asks the model only what nobody asked before."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], dict[str, float]] = {}

    def __call__(self, racing: Sequence[Standing], samples: Sequence[Sample]) -> None:
        """A block of images."""
        for one in racing:
            new = [sample for sample in samples if (id(one.tool), id(sample)) not in self.known]
            if new:
                fresh = Standing(one.tool, {name: [] for name in one.values})
                judged([fresh], new, 6, 8, 0)
                for i, sample in enumerate(new):
                    self.known[id(one.tool), id(sample)] = {name: own[i] for name, own in fresh.values.items()}
            for sample in samples:
                for name, own in one.values.items():
                    own.append(self.known[id(one.tool), id(sample)][name])
            one.images += len(samples)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, race, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", help="default: those of camscope choose")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    model = load_model("phantom")
    scans = [draw(3000 + n, CATEGORIES[1 + n % 3]) for n in range(options.images)]
    for masked in (True, False):
        pool = [Sample(GradCAM(model).read(one.image), one.name, one.mask if masked else None) for one in scans]
        tools = candidates(model, pool[0].item.x[None], options.methods)
        judge = Remembering()
        whole = choose(tools, pool, exhaustive=True, judge=judge)
        print(
            f"{'with' if masked else 'without'} masks, {len(tools)} candidates, all images: {said(whole)}", flush=True
        )
        alike = {one.title for one in whole.alike}
        for seed in range(options.seeds):
            race = choose(tools, pool, seed=seed, judge=judge)
            leader = race.standings[0].title
            same = {one.title for one in race.best} == {one.title for one in whole.best}
            share = race.explained / race.exhaustive
            print(
                f"  seed {seed}: {share:.2f} of the maps, same {same}, leader {leader}, alike {leader in alike}: {said(race)}"
            )


def said(choice: Choice) -> str:
    """Who is recommended, or who cannot be told apart."""
    words = " or ".join(one.title for one in choice.best)
    return words or f"no clear winner among {', '.join(one.title for one in choice.alike)}"


if __name__ == "__main__":
    main()
