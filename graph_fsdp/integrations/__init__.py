"""Integrations with Hugging Face Accelerate, transformers' Trainer and Lightning are modules here."""
