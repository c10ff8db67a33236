"""How does a run read as a page that one shows to colleagues: one HTML file, without the network?

`page` writes it; `account` is what a run says, `forecast` what the twin says beside it; `answers` are the first
screen, the `*_figures` what stands below; `drawing` is how a figure is drawn, `page.html`, `page.css` and `page.js` how
it looks.
"""
