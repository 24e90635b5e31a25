"""Limits: what no audit can say. They are printed on every report, whatever was configured."""

LIMITS = (
    "A map shows where a model is sensitive. It shows neither disease nor cause.",
    "That maps lie on the finding does not prove that the model uses it; that they do not lie there does not prove a shortcut.",
    "What is finer than the cells of a map the map can neither show nor exclude; only interventions tell.",
    "An intervention makes images that nobody took. An effect counts only where it holds under every fill.",
    "Confounders that are unknown, or that nobody can see or mask, are not excluded.",
    "Randomisation tests tell maps that depend on the training from those that do not. They do not rank methods.",
    "Nothing here is validated for clinical use.",
    "All numbers hold for these images and these weights only.",
)
