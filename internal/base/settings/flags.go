package settings

import (
	"strings"

	"github.com/alecthomas/kong"
)

// Environment names the environment variable of each flag: prefix_ and the flag in
// capitals, with _ for - and dots.
func Environment(prefix string) kong.Option {
	name := strings.NewReplacer("-", "_", ".", "_")
	var visit func(node *kong.Node)
	visit = func(node *kong.Node) {
		for _, flag := range node.Flags {
			if flag.Name != "help" && flag.Name != "version" {
				flag.Envs = []string{prefix + "_" + strings.ToUpper(name.Replace(flag.Name))}
				flag.Tag.Envs = flag.Envs
			}
		}
		for _, child := range node.Children {
			visit(child)
		}
	}
	return kong.PostBuild(func(k *kong.Kong) error {
		visit(k.Model.Node)
		return nil
	})
}

// FileFlag is the flag of a command's configuration file.
type FileFlag struct {
	ConfigFile string `group:"Logs and settings" name:"config" placeholder:"FILE" help:"YAML configuration file: flag names as keys. It may have those of serve, too."`
}
