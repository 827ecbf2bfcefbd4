"""A resume: which checkpoint it starts from, in which order the parts are restored, and what is reported."""
