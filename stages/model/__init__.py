"""One stage's slice of a model: locate, build, load, attend. Empty on purpose: ``source`` loads without torch."""
