package fair

// Class is the urgency of a request. Requests of a class are served before those of all later
// classes.
type Class int8

const (
	// Interactive requests are served first.
	Interactive Class = iota - 1
	// Standard is the default class.
	Standard
	// Batch requests use the remaining capacity.
	Batch
)

// Classes are all classes, in the order of service.
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

// ClassOf returns the class of a name; not ok: the name is unknown.
func ClassOf(name string) (c Class, ok bool) {
	for _, c := range Classes {
		if c.String() == name {
			return c, true
		}
	}
	return Standard, false
}

// known is the class, or the nearest valid one.
func (c Class) known() Class { return min(max(c, Interactive), Batch) }

// Place returns the place of the class in Classes.
func (c Class) Place() int { return int(c.known() - Interactive) }
