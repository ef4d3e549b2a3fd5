package top

import (
	"fmt"

	tea "charm.land/bubbletea/v2"
)

// model is the state that the terminal shows and keys change.
type model struct {
	frame
	rows int // of workers that were drawn last
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return nil }

// Update implements tea.Model.
func (m *model) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := message.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case update:
		m.problem = ""
		if msg.problem != nil {
			m.problem = cleanText(fmt.Sprintf("%v; again in %s", msg.problem, msg.again))
		} else {
			m.state = msg.state
		}
	case tea.KeyPressMsg:
		return m, m.press(msg.String())
	}
	return m, nil
}

// press performs the action of a key.
func (m *model) press(key string) tea.Cmd {
	last := 0
	if m.state != nil {
		last = max(0, len(m.state.Workers)-max(1, m.rows))
	}
	m.skip = min(m.skip, last) // there may be fewer workers, or more rows, than there were
	switch key {
	case "q", "ctrl+c", "esc":
		return tea.Quit
	case "up":
		m.skip--
	case "down":
		m.skip++
	case "pgup":
		m.skip -= 10
	case "pgdown", "space":
		m.skip += 10
	case "home":
		m.skip = 0
	case "end":
		m.skip = last
	default:
		for i, o := range orders() {
			if o.key == key {
				m.reverse = i == m.sort && !m.reverse
				m.sort, m.skip = i, 0
			}
		}
	}
	m.skip = max(0, min(m.skip, last))
	return nil
}

// View implements tea.Model.
func (m *model) View() tea.View {
	view := tea.NewView("")
	if m.height > 0 { // it is known
		var text string
		text, m.rows = m.draw()
		view.SetContent(text)
	}
	view.AltScreen = true
	return view
}
