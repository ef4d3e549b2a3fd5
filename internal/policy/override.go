package policy

// Override are settings for one request; what is nil stays as it is.
type Override struct {
	OverlapScoreWeight *float64 // older name of PrefillLoadScale, see PolicyKnobs
	OverlapScoreCredit *float64
	PrefillLoadScale   *float64
	RouterTemperature  *float64
	AssumeKVReuse      *bool
	TrackPrefillTokens *bool
}
