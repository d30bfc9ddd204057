"""Model definitions of the aligned trainer, one file a family."""
