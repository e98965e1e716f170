"""The answer of the planner: in lines, as JSON, as a picture, as a refusal."""
