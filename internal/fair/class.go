package fair

// Class is how urgent a request is. Requests of a class go before those of all later
// classes.
type Class int8

const (
	// Interactive requests go first.
	Interactive Class = iota - 1
	// Standard is the class of a request of which nothing is said.
	Standard
	// Batch requests use what the others leave.
	Batch
)

// Classes are all classes, the one that goes first at the front.
var Classes = [...]Class{Interactive, Standard, Batch}

// String returns the name of the class: interactive, standard or batch.
func (c Class) String() string {
	switch c.known() {
	case Interactive:
		return "interactive"
	case Batch:
		return "batch"
	}
	return "standard"
}

// ClassOf returns the class of a name; not ok: there is none of that name.
func ClassOf(name string) (c Class, ok bool) {
	for _, c := range Classes {
		if c.String() == name {
			return c, true
		}
	}
	return Standard, false
}

// known is the class, or the nearest that there is.
func (c Class) known() Class { return min(max(c, Interactive), Batch) }

// Place returns the place of the class in Classes.
func (c Class) Place() int { return int(c.known() - Interactive) }
