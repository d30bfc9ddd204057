"""The patch carrier: pins, series, lock, atomic apply and revert, rebase. Standard library and git only."""
