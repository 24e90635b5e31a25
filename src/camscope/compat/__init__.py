"""Drop-in replacements for other toolkits: their names and numbers, computed by camscope's explainers."""
