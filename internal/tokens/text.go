package tokens

import (
	"github.com/tidwall/gjson"
)

func readBool(v gjson.Result, name string, into *bool) error {
	if v.Type != gjson.True && v.Type != gjson.False {
		return notRenderable("%s is not true or false", name)
	}
	*into = v.Type == gjson.True
	return nil
}
