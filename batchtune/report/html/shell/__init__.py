"""What do all pages share: the document and its template, how figures are drawn, latencies, batches, trials?"""
