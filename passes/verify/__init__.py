"""The verifier checks what a schedule must never break."""
