"""How hidden states and sampled tokens travel between ranks. Empty on purpose: ``links`` and ``choice`` load without torch."""
