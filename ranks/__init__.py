"""The processes of a job: how they are started, watched and ended, on one host and on several."""
