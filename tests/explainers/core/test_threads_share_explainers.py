"""Explainers may be shared by threads: the maps are equal to the bit to those of one thread."""

import threading

import numpy as np

from camscope import GradCAM, load_model
from camscope.phantom import draw_radiograph


def test_threads_share_one_explainer_of_each_kind():
    """Eight threads and one explainer: the maps are equal to the bit to those of one thread."""
    from camscope import IntegratedGradients, LayerCAM, Saliency

    model = load_model("phantom")
    explainers = [GradCAM(model), LayerCAM(model, "layer2"), Saliency(model), IntegratedGradients(model, n_steps=4)]
    images = [draw_radiograph(seed, "nodule").image for seed in range(4)]
    direct = [[explainer.explain(image, 1).attribution for image in images] for explainer in explainers]
    barrier, wrong = threading.Barrier(8), []

    def run(thread):
        barrier.wait()
        for n in range(8):
            e, i = (n + thread) % 4, (n * thread) % 4
            if not np.array_equal(explainers[e].explain(images[i], 1).attribution, direct[e][i]):
                wrong.append((thread, e, i))

    threads = [threading.Thread(target=run, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(part._forward_hooks for part in model.modules())
