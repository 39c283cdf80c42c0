"""What every package shares: writing files whole, recording how a result came about, and declaring options."""
