"""What docs/leaderboard.md says in words; {model/part/method/metric} is that number of its tables."""

PREFACE = """# Leaderboard: where the methods look, against boxes

Photographs of ImageNet's validation set with the objects' boxes, each asked for its label; methods with their settings as
they come, CAMs at the layer that camscope chooses. Means with bootstrap intervals (95 %) over photographs; **bold**: better
than the best map that knows nothing of the model (uniform, centre, edges, random), paired by photograph, at 5 % after Holm's
correction. Seconds are those of one core for a photograph. A box holds background too, so no map reaches the end of a scale;
and a map that lies on the object is not thereby what the model used: for that, see the faithfulness metrics. Made by
`python -m benchmarks.leaderboard` on {processor}, torch {torch}; `camscope measure` does the same with images and boxes of
yours.
"""

CONCLUSIONS = """## What to conclude
"""

SLOW = """Drawn once from all; Grad-CAM and the controls are measured on the same ones. Every method has the passes of its
defaults.

"""
