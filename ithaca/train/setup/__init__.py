"""Everything that a run settles before its first step: configuration, Plan, data, stages, learning rate, origin."""
