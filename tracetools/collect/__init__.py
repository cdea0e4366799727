"""Recording a training job: launcher (here) and recorder (inject/, runs inside the training processes)."""
