// Tables in a block "sortable": a click on a heading sorts the rows by this column, a second one the other way.
function value(row, column) {
  const text = row.cells[column].textContent.trim()
  const number = parseFloat(text)
  return isNaN(number) ? text : number
}

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === 'number' ? a - b : a.localeCompare(b)
  return typeof a === 'number' ? -1 : 1 // numbers before dashes and words
}

function sortBy(heading) {
  const table = heading.closest('table')
  const down = heading.getAttribute('aria-sort') === 'ascending'
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort')
  heading.setAttribute('aria-sort', down ? 'descending' : 'ascending')
  const rows = [...table.tBodies[0].rows]
  rows.sort((a, b) => compare(value(a, heading.cellIndex), value(b, heading.cellIndex)) * (down ? -1 : 1))
  table.tBodies[0].append(...rows)
}

addEventListener('DOMContentLoaded', () => {
  for (const heading of document.querySelectorAll('.sortable th')) {
    heading.tabIndex = 0
    heading.addEventListener('click', () => sortBy(heading))
    heading.addEventListener('keydown', event => { if (event.key === 'Enter') sortBy(heading) })
  }
})
