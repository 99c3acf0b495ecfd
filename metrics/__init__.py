"""What is measured and how it is shown."""
