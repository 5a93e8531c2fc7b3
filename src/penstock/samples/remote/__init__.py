"""Sample stores on drives of other machines: what lies on a namespace, and how it comes there."""
