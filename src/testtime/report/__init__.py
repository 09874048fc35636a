"""Reports: one self-contained HTML page about a run, from plain data.

`gather.stream_report` collects the data from a run over features, `record.Record` from a running session; `page.html`
makes the page.
"""
