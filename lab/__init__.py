"""What measures RayZero, beside the package and not installed with it: ``python -m lab NAME``, from a checkout."""
