"""Maps of two kinds are told apart, maps of one kind are not, however they wander; shares in clusters are counted right."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.metrics import adjusted_rand_score

from camscope.audit.clustering.map_clustering import (
    assign_labels_qr,
    cluster_maps,
    compute_laplacian_eigenvalues_and_eigenvectors,
    pool_maps,
    smooth_maps_and_find_nonzero,
)
from camscope.audit.clustering.regions_and_subgroups_of_clusters import compute_level_enrichment
from camscope.errors import InputError, UndefinedError

QUICK = {"n_resamples": 10, "n_references": 5}


def blobs(random, centers, size=48, width=4.0, noise=0.05):
    """Maps of a Gaussian at each center, of any strength, under grain."""
    axis = np.arange(size)
    down, right = (
        np.exp(-((axis - np.asarray(one)[:, None]) ** 2) / (2 * width**2)) for one in zip(*centers, strict=True)
    )
    heat = random.uniform(0.3, 3, (len(down), 1, 1)) * down[:, :, None] * right[:, None, :]
    return heat + noise * random.normal(size=heat.shape)


def in_lungs(random, n):
    """Places in either of two tall ellipses."""
    angle, out, side = random.uniform(0, 2 * np.pi, n), np.sqrt(random.random(n)), random.choice([-1, 1], n)
    return list(zip(26 + 14 * out * np.sin(angle), 24 + side * 10 + 6 * out * np.cos(angle), strict=True))


def in_a_corner(random, n):
    return list(zip(random.uniform(4, 6, n), random.uniform(4, 6, n), strict=True))


def two_kinds(random, n=160, share=0.4):
    kind = random.random(n) < share
    return blobs(random, [in_a_corner(random, 1)[0] if one else in_lungs(random, 1)[0] for one in kind]), kind


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.one_in(2)
def test_two_kinds_are_two_strategies(share):
    for seed in range(3):
        maps, kind = two_kinds(np.random.default_rng(seed), share=share)
        found = cluster_maps(maps, **QUICK)
        assert found.n_clusters == 2
        two = found.partitions[2]
        assert adjusted_rand_score(kind, two.labels) >= 0.9
        assert two.is_stable
        assert two.is_separate
        assert len(two.clusters[0].rows) >= len(two.clusters[1].rows)
        assert [len(one.rows) for one in two.clusters] == np.bincount(two.labels).tolist()


@pytest.mark.parametrize("n_seeds", [3, pytest.param(10, marks=pytest.mark.thorough)])
def test_one_kind_is_one_strategy_wherever_it_wanders(n_seeds):
    claimed = []
    for seed in range(n_seeds):
        random = np.random.default_rng(100 + seed)
        claimed.append(cluster_maps(blobs(random, in_lungs(random, 120)), **QUICK).n_clusters)
        line = [(24 + 18 * t, 24 + 10 * t) for t in random.uniform(-1, 1, 120)]
        claimed.append(cluster_maps(blobs(random, line), **QUICK).n_clusters)
    assert sum(one > 1 for one in claimed[::2]) <= 1
    assert sum(one > 1 for one in claimed[1::2]) <= 1


@pytest.mark.slow
def test_maps_without_any_place_are_one_strategy():
    random = np.random.default_rng(1)
    assert cluster_maps(random.random((100, 20, 20)), **QUICK).n_clusters == 1
    assert cluster_maps(blobs(random, in_a_corner(random, 100)), **QUICK).n_clusters == 1
    assert cluster_maps(np.ones((40, 12, 12)), **QUICK).n_clusters == 1


@pytest.mark.slow
def test_stability_alone_would_claim_what_is_not_there():
    random = np.random.default_rng(2)
    partitions = cluster_maps(blobs(random, in_lungs(random, 160)), **QUICK).partitions.values()
    assert not any(one.is_stable and one.is_separate for one in partitions)
    assert [one.is_stable for one in partitions] == [one.stability > one.reference_stability for one in partitions]
    assert all(one.eigengap < 7 / 8 for one in partitions)


@pytest.mark.slow
def test_left_and_right_are_one_place():
    random = np.random.default_rng(3)
    right = random.random(100) < 0.5
    maps = blobs(random, [(24 + random.normal(), 36 if one else 11) for one in right])
    assert cluster_maps(maps, **QUICK).n_clusters == 1


@pytest.mark.slow
def test_three_kinds_and_two_that_overlap():
    random = np.random.default_rng(4)
    kind = random.integers(0, 3, 150)
    corners = np.array([(6, 6), (24, 24), (42, 6)])[kind] + random.normal(size=(150, 2))
    found = cluster_maps(blobs(random, corners), **QUICK)
    assert found.n_clusters == 3
    assert adjusted_rand_score(kind, found.partitions[3].labels) >= 0.9
    near = np.array([(20, 24), (26, 24)])[kind % 2] + 4 * random.normal(size=(150, 2))
    assert cluster_maps(blobs(random, near), **QUICK).n_clusters == 1


@pytest.mark.slow
def test_images_of_one_patient_are_no_strategy():
    random = np.random.default_rng(5)
    seen = blobs(random, in_lungs(random, 60), noise=0)
    maps = np.concatenate([seen, np.repeat(seen[:1], 30, 0) + 0.001 * random.random((30, 48, 48))])
    patients = [*range(60), *[0] * 30]
    assert cluster_maps(maps, patients, **QUICK).n_clusters == 1
    alone = cluster_maps(maps, **QUICK)
    assert alone.partitions[2].eigengap > cluster_maps(maps, patients, **QUICK).partitions[2].eigengap


@pytest.mark.slow
def test_the_same_whenever_asked_and_for_any_strength():
    maps, _ = two_kinds(np.random.default_rng(6), 80)
    one, two = cluster_maps(maps, **QUICK), cluster_maps(maps * np.linspace(0.1, 90, 80)[:, None, None], **QUICK)
    for other in (cluster_maps(maps, **QUICK), two):
        assert one.n_clusters == other.n_clusters
        for k, partition in one.partitions.items():
            assert (partition.labels == other.partitions[k].labels).all()
            assert partition.stability == other.partitions[k].stability
    assert one.eigenvalues == cluster_maps(maps, **QUICK).eigenvalues
    assert len(one.eigenvalues) == 32
    assert list(one.eigenvalues) == sorted(one.eigenvalues)


@pytest.mark.slow
def test_maps_without_heat_are_left_out_and_counted():
    random = np.random.default_rng(7)
    maps, kind = two_kinds(random, 100)
    maps = np.abs(maps)
    maps[[3, 50]] = 0
    maps[60] *= -1
    found = cluster_maps(maps, **QUICK)
    assert (found.zero_rows, found.n_maps, found.n_patients) == ((3, 50, 60), 97, 97)
    labels = found.partitions[2].labels
    assert (labels[[3, 50, 60]] == -1).all()
    members = [row for one in found.partitions[2].clusters for row in one.rows]
    assert sorted(members) == [row for row in range(100) if row not in (3, 50, 60)]
    assert adjusted_rand_score(kind[members], labels[members]) >= 0.9


@pytest.mark.slow
def test_a_prototype_is_like_its_cluster():
    maps, kind = two_kinds(np.random.default_rng(8), 80)
    found = cluster_maps(maps, **QUICK)
    corner = next(one for one in found.partitions[2].clusters if kind[one.rows[0]])
    assert all(kind[row] for row in corner.medoid_rows)
    assert len(corner.medoid_rows) == 3
    assert set(corner.medoid_rows) <= set(corner.rows)


@pytest.mark.slow
def test_volumes_and_lines_and_more_maps_than_are_clustered():
    random = np.random.default_rng(9)
    maps, kind = two_kinds(random, 90)
    deep = np.clip(maps, 0, None)[:, None, ::4, ::4] * np.exp(-((np.arange(12) - 3.0) ** 2) / 8)[:, None, None]
    found = cluster_maps(deep, **QUICK)
    assert found.n_clusters == 2
    assert cluster_maps(maps[:, 5], **QUICK).n_maps == 90
    part = cluster_maps(maps, **QUICK, max_maps=60)
    assert part.n_maps == 90
    assert adjusted_rand_score(kind, part.partitions[2].labels) >= 0.9


def test_pooling_by_hand():
    heat = np.array([[[1.0, 3.0, -5.0, 1.0], [1.0, 3.0, 0.0, 0.0]]])
    assert pool_maps(heat, 2).tolist() == [[[2.0, 0.5], [2.0, 0.0]]]
    assert pool_maps(np.array([[1.0, 2.0, 4.0]]), 2)[0] == pytest.approx(
        [(1 + 1) / 1.5, (1 + 4) / 1.5]
    )  # halves of the middle
    assert pool_maps(heat, 9).shape == (1, 2, 4)
    points, there = smooth_maps_and_find_nonzero(np.array([[1.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), 0.0)
    assert points.tolist() == [[0.5, 0.0, 0.0, 0.5]]
    assert there.tolist() == [True, False]
    near, far = (smooth_maps_and_find_nonzero(np.eye(16)[[1, 2, 6]], blur)[0] for blur in (1 / 16, 0.0))
    assert np.linalg.norm(near[0] - near[1]) < 0.6 * np.linalg.norm(near[0] - near[2])
    assert np.linalg.norm(far[0] - far[1]) == pytest.approx(np.linalg.norm(far[0] - far[2]))


def test_the_laplacian_of_a_small_graph():
    # two pairs: each is the other's nearest, so that A has ones, D is 1, and 1 - (±1) is 0, 0, 2, 2
    place = np.array([0.0, 1.0, 10.0, 11.0])
    apart = np.abs(place[:, None] - place)
    values, vectors = compute_laplacian_eigenvalues_and_eigenvectors(apart, np.arange(4), 1, 4)
    assert values == pytest.approx([0, 0, 2, 2], abs=1e-12)
    labels = assign_labels_qr(vectors, 2)
    assert labels[0] == labels[1] != labels[2] == labels[3]
    # as images of one patient the first two are no neighbors: each looks to 10, which looks to 11
    assert compute_laplacian_eigenvalues_and_eigenvectors(apart, np.array([0, 0, 1, 2]), 1, 4)[0][1] > 0.01


def test_a_line_leaps_by_four():
    place = np.linspace(0, 1, 300)
    values, _ = compute_laplacian_eigenvalues_and_eigenvectors(np.abs(place[:, None] - place), np.arange(300), 10, 5)
    assert values[2] / values[1] == pytest.approx(4, rel=0.02)
    assert values[3] / values[2] == pytest.approx(9 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: cluster_maps(np.ones((8, 4, 4))),
            UndefinedError,
            "8 patients have maps with positive values, of 8 maps; clusters need at least 20 patients",
        ),
        (
            lambda: cluster_maps(np.zeros((30, 4, 4))),
            UndefinedError,
            "0 patients have maps with positive values, of 30 maps",
        ),
        (lambda: cluster_maps(np.ones((30, 4, 4)), ["a"] * 30), UndefinedError, "1 patient"),
        (lambda: cluster_maps(np.ones((30, 4)), max_maps=9), UndefinedError, "9 patients"),
        (lambda: cluster_maps(np.ones((30, 4)), ["a"]), InputError, "30 rows and 1 group"),
        (
            lambda: compute_level_enrichment(np.array([0, 0, 1]), ["a", "a", None]),
            UndefinedError,
            "1 cluster and 1 level",
        ),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_enrichment_by_hand():
    # the lady tasting tea: 3 of 4 cups right, p = (16 + 1 + 16 + 1) / 70
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, -1, 0])
    column = ["tea", "tea", "tea", "milk", "tea", "milk", "milk", "milk", "tea", None]
    (found,) = compute_level_enrichment(labels, column)
    assert (found.cluster, found.level) == (1, "tea")
    assert (found.share_inside, found.share_outside) == (0.25, 0.75)
    assert found.p_value == pytest.approx(34 / 70)
    assert found.corrected_p_value == found.p_value


def test_enrichment_of_several_is_corrected_and_of_patients():
    random = np.random.default_rng(10)
    labels = random.integers(0, 3, 300)
    site = np.where((labels == 1) & (random.random(300) < 0.6), "c", random.choice(["a", "b"], 300))
    found = compute_level_enrichment(labels, site)
    assert len(found) == 9
    assert (found[0].cluster, found[0].level) == (1, "c")
    assert found[0].corrected_p_value == pytest.approx(9 * found[0].p_value)
    assert found[0].share_inside > 0.5 > found[0].share_outside == 0.0
    images = np.repeat(np.arange(300), 4)
    again = compute_level_enrichment(labels[images], site[images], list(images))
    assert again == found  # four images of each say no more than one
    assert compute_level_enrichment(labels[images], site[images])[0].p_value < found[0].p_value
