"""What every package shares: writing files whole, and recording how a result came about."""
