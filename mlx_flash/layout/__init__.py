"""A lazily loaded model: its parameters, the tensors behind them, and the units that are streamed."""
