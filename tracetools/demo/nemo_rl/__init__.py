"""NeMo-RL's own SFT loop on a CPU. Its modules run in NeMo-RL's environment, by path: nothing there knows this package."""
