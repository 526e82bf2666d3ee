"""The subcommands of ``mlx-flash``, a module each."""
