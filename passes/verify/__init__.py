"""The verifier: what a schedule must never break."""
