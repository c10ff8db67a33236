"""What all pages share: the document and its template, the drawing of figures, latencies, batches, trials."""
