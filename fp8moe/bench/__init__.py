"""Topics of ``fp8moe bench``, one module each: an operation's time beside the copy bandwidth."""
