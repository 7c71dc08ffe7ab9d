"""Where people already train: Hugging Face Accelerate and the Trainer of transformers."""
