"""Training as in section 5 of the paper: loss, schedule, optimizer step, run folder, trainer."""
