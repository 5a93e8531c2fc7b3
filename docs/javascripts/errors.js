// The page of all error texts: what is pasted is looked for among them, numbers and names left out.
const words = (text) => text.toLowerCase().match(/[\p{L}_][\p{L}\w.'-]*[\p{L}\w]/gu) ?? []

const box = document.querySelector("#error-text")
if (box) {
  const best = document.createElement("ul")
  box.after(best)
  const texts = [...document.querySelectorAll("article li > a > code")].map((code) => ({
    link: code.parentElement,
    words: words(code.textContent),
  }))
  box.addEventListener("input", () => {
    const pasted = new Set(words(box.value))
    const found = texts.map(({ link, words }) => {
      const same = words.filter((word) => pasted.has(word)).length
      return { link, same, share: words.length ? same / words.length : 0 }
    })
    const shown = found.filter(({ same, share }) => same > 0 && (share >= 0.6 || same >= pasted.size * 0.7))
    shown.sort((one, other) => other.share * other.same - one.share * one.same)
    best.replaceChildren(
      ...shown.slice(0, 6).map(({ link }) => {
        const item = document.createElement("li")
        item.append(link.cloneNode(true))
        return item
      }),
    )
  })
}
