"""A run as a page that one shows to colleagues: one HTML file, without the network.

`shell/` is what all pages share: `document` is what a page says and `render` fills the template, `drawing` is how a
figure is drawn, `page.html`, `page.css` and `page.js` how it looks. `sweep_page`, `comparison_page`, `check_page` and
`load_page` are the pages; the `*_figures` draw what is below their first screens.
"""
