"""Whether the maps of a model fall into several ways of looking, and what each is made of."""
