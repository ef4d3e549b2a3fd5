package thompson

import (
	"math"
	"math/rand/v2"
	"slices"
)

// banditDim is the number of features of a decision.
const banditDim = 9

type banditVector [banditDim]float64

func dot(a, b *banditVector) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// The factorization of A is tried with jitter on its diagonal, each time ten
// times as much; when even the most of it does not help, A's eigenvalues are
// raised to a floor instead.
const (
	banditJitter      = 1e-9
	banditJitterMost  = 1e-3
	banditEigenvalues = 1e-10
)

// linearBandit is a Bayesian linear model of the reward, given the features x of
// a decision: weights have the mean A⁻¹b and the covariance v²A⁻¹.
type linearBandit struct {
	a banditMatrix
	b banditVector

	factored bool         // all below fits a and b
	upper    banditMatrix // Lᵀ, where LLᵀ is a with jitter
	half     banditVector // L⁻¹b
	eigen    *banditEigen // in their place where a cannot be factored
}

// banditPrior is the prior belief: weights of the mean
// theta and the variance v²/lambda each.
type banditPrior struct {
	lambda float64
	theta  banditVector
}

func newLinearBandit(prior *banditPrior) *linearBandit {
	l := &linearBandit{}
	l.forget(0, prior)
	return l
}

// forget lets all that was learned count keep times as much, 0 to 1, and the
// prior the rest.
func (l *linearBandit) forget(keep float64, prior *banditPrior) {
	if keep == 1 {
		return
	}
	ridge := (1 - keep) * prior.lambda
	for i := range l.a {
		l.a[i] *= keep
	}
	for i := range banditDim {
		l.a[i*banditDim+i] += ridge
		l.b[i] = keep*l.b[i] + ridge*prior.theta[i]
	}
	l.factored = false
}

// learn updates the belief with the reward of a decision.
func (l *linearBandit) learn(x *banditVector, reward float64) {
	for i := range banditDim {
		for j := i; j < banditDim; j++ {
			l.a[i*banditDim+j] += x[i] * x[j]
		}
		l.b[i] += reward * x[i]
	}
	l.factored = false
}

// sample returns θᵀx for weights θ drawn with the standard normal draws z.
func (l *linearBandit) sample(x, z *banditVector, v float64) float64 {
	if !l.factored {
		l.factor()
	}
	if e := l.eigen; e != nil {
		sum := 0.0
		for k, value := range e.values {
			along, b := dot(&e.vectors[k], x), dot(&e.vectors[k], &l.b)
			sum += along * (b/value + v*z[k]/math.Sqrt(value))
		}
		return sum
	}
	// θ = L⁻ᵀ(L⁻¹b + v·z), so θᵀx = (L⁻¹b + v·z)ᵀ(L⁻¹x).
	u := *x
	l.upper.solve(&u)
	sum := 0.0
	for i := range banditDim {
		sum += (l.half[i] + v*z[i]) * u[i]
	}
	return sum
}

func (l *linearBandit) factor() {
	l.factored, l.eigen = true, nil
	for jitter := banditJitter; jitter <= banditJitterMost; jitter *= 10 {
		l.upper = l.a
		for i := range banditDim {
			l.upper[i*banditDim+i] += jitter
		}
		if l.upper.factor() {
			l.half = l.b
			l.upper.solve(&l.half)
			return
		}
	}
	l.eigen = newBanditEigen(&l.a)
}

// betaBandit is the belief of a worker's mean reward: a beta
// distribution, flat at first.
type betaBandit struct{ alpha, beta float64 }

func newBetaBandit() betaBandit { return betaBandit{1, 1} }

// forget lets all that was learned count keep times as much, 0 to 1.
func (b *betaBandit) forget(keep float64) {
	b.alpha, b.beta = 1+keep*(b.alpha-1), 1+keep*(b.beta-1)
}

// learn updates the belief with a reward from 0 to 1.
func (b *betaBandit) learn(reward float64) {
	b.alpha += reward
	b.beta += 1 - reward
}

func (b betaBandit) sample(random draws) float64 { return random.mean(b) }

// draws are what chance gives to a decision.
type draws interface {
	NormFloat64() float64           // standard normal
	mean(belief betaBandit) float64 // of the belief of a mean reward
	Float64() float64               // uniform from 0 to 1
}

// randomDraws are real ones.
type randomDraws struct{ *rand.Rand }

func (r randomDraws) mean(belief betaBandit) float64 {
	x, y := r.gamma(belief.alpha), r.gamma(belief.beta)
	return x / (x + y)
}

// gamma draws from a gamma distribution of that shape, above 0, and scale 1: Marsaglia and Tsang,
// A simple method for generating gamma variables, ACM TOMS 26, 2000.
func (r randomDraws) gamma(shape float64) float64 {
	if shape < 1 {
		return r.gamma(shape+1) * math.Pow(r.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		v *= v * v
		if v > 0 && math.Log(1-r.Float64()) < x*x/2+d*(1-v+math.Log(v)) {
			return d * v
		}
	}
}

// softmaxOf turns scores into chances, even ones where that cannot be done.
func softmaxOf(chances, scores []float64, temperature float64) []float64 {
	chances = chances[:0]
	highest, sum := slices.Max(scores), 0.0
	for _, s := range scores {
		chances = append(chances, math.Exp((s-highest)/max(1e-6, temperature)))
		sum += chances[len(chances)-1]
	}
	for i := range chances {
		chances[i] /= sum
		if !(sum > 0) || math.IsInf(sum, 1) {
			chances[i] = 1 / float64(len(scores))
		}
	}
	return chances
}

// drawFrom returns the index that a uniform draw from 0 to 1 falls on; 0 where
// rounding leaves none.
func drawFrom(chances []float64, draw float64) int {
	sum := 0.0
	for i, chance := range chances {
		if sum += chance; draw <= sum {
			return i
		}
	}
	return 0
}
