"""The expert layer, composed of operations: its options, its precision recipes, forward and backward."""
