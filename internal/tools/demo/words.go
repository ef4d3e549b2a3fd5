package demo

import (
	"math/rand/v2"
	"strings"
)

// places are the employers of the demo's assistants, each with its own system prompt.
var places = [...]string{"a small bookshop in Lisbon", "the harbour office of Bergen", "a bicycle workshop in Ghent",
	"the observatory on the hill"}

// words are the words of the demo's texts.
var words = strings.Fields(`
	the a one every that this some our their river harbour bicycle lantern garden window kitchen letter train morning
	winter market bridge teacher captain painter neighbour cat kettle orchard mountain island boat lamp map clock
	opens closes carries mends finds follows answers asks paints writes counts measures watches remembers forgets
	builds borrows brings keeps moves turns waits walks early late slowly quickly twice again often never quietly
	under over behind beside between across along before after with without from into about because although while
	green old small bright heavy quiet wooden broken early distant narrow warm empty hidden silver`)

// text returns a text of that many words, the same one for each number.
func text(number uint64, n int) string { return made(rand.New(rand.NewPCG(number, 7)), n) }

// words returns a random text of that many words.
func (c *client) words(n int) string { return made(c.random, n) }

func made(random *rand.Rand, n int) string {
	var out strings.Builder
	for i := range n {
		switch {
		case i == 0:
		case i%12 == 0:
			out.WriteString(". ")
		default:
			out.WriteByte(' ')
		}
		out.WriteString(words[random.IntN(len(words))])
	}
	out.WriteByte('.')
	return out.String()
}
