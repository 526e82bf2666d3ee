"""What ``mlx-flash`` can be told to do, one module each."""
